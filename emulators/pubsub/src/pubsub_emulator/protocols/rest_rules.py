"""Maps HTTP requests to calls using the services' `google.api.http` rules.

Source: https://github.com/googleapis/googleapis/tree/master/google/pubsub/v1. A test compares these
rules with the installed client's REST transports.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

_TOPIC = "projects/*/topics/*"
_SUBSCRIPTION = "projects/*/subscriptions/*"
_SNAPSHOT = "projects/*/snapshots/*"
_SCHEMA = "projects/*/schemas/*"
_VARIABLE = re.compile(r"\{(?P<name>[a-z_.]+)=(?P<pattern>[^}]+)\}")


@dataclass(frozen=True)
class Rule:
    """A rule. `body` is `*`, the name of the field that contains the body, or empty."""

    verb: str
    template: str
    call: str
    body: str = ""

    def match(self, verb: str, path: str) -> Mapping[str, str] | None:
        """Return the fields in the path. None: the rule does not match the request.

        Args:
            verb: GET, POST, PUT, PATCH or DELETE.
        """
        if verb != self.verb:
            return None
        matched = self._pattern.fullmatch(path)
        return {self._field: unquote(matched[1])} if matched else None

    @cached_property
    def _field(self) -> str:
        return self._variable["name"]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        before, after = (
            re.escape(part)
            for part in (
                self.template[: self._variable.start()],
                self.template[self._variable.end() :],
            )
        )
        *folders, last = self._variable["pattern"].split("/")
        # A project id may contain a colon, as in `example.com:project`. A resource id can't,
        # because a custom verb follows a colon.
        inner = "/".join("[^/]+" if part == "*" else part for part in folders)
        last = "[^/]+" if after.startswith("/") else "[^/:]+"
        return re.compile(f"{before}({inner}/{last}){after}")

    @cached_property
    def _variable(self) -> re.Match[str]:
        variable = _VARIABLE.search(self.template)
        if variable is None:
            raise ValueError(f"the template {self.template} has no variable; this is a bug")
        return variable


RULES = (
    Rule("PUT", f"/v1/{{name={_TOPIC}}}", "CreateTopic", "*"),
    Rule("PATCH", f"/v1/{{topic.name={_TOPIC}}}", "UpdateTopic", "*"),
    Rule("POST", f"/v1/{{topic={_TOPIC}}}:publish", "Publish", "*"),
    Rule("GET", f"/v1/{{topic={_TOPIC}}}", "GetTopic"),
    Rule("GET", "/v1/{project=projects/*}/topics", "ListTopics"),
    Rule("GET", f"/v1/{{topic={_TOPIC}}}/subscriptions", "ListTopicSubscriptions"),
    Rule("GET", f"/v1/{{topic={_TOPIC}}}/snapshots", "ListTopicSnapshots"),
    Rule("DELETE", f"/v1/{{topic={_TOPIC}}}", "DeleteTopic"),
    Rule("POST", f"/v1/{{subscription={_SUBSCRIPTION}}}:detach", "DetachSubscription"),
    Rule("PUT", f"/v1/{{name={_SUBSCRIPTION}}}", "CreateSubscription", "*"),
    Rule("GET", f"/v1/{{subscription={_SUBSCRIPTION}}}", "GetSubscription"),
    Rule("PATCH", f"/v1/{{subscription.name={_SUBSCRIPTION}}}", "UpdateSubscription", "*"),
    Rule("GET", "/v1/{project=projects/*}/subscriptions", "ListSubscriptions"),
    Rule("DELETE", f"/v1/{{subscription={_SUBSCRIPTION}}}", "DeleteSubscription"),
    Rule(
        "POST",
        f"/v1/{{subscription={_SUBSCRIPTION}}}:modifyAckDeadline",
        "ModifyAckDeadline",
        "*",
    ),
    Rule("POST", f"/v1/{{subscription={_SUBSCRIPTION}}}:acknowledge", "Acknowledge", "*"),
    Rule("POST", f"/v1/{{subscription={_SUBSCRIPTION}}}:pull", "Pull", "*"),
    Rule(
        "POST",
        f"/v1/{{subscription={_SUBSCRIPTION}}}:modifyPushConfig",
        "ModifyPushConfig",
        "*",
    ),
    Rule("POST", f"/v1/{{subscription={_SUBSCRIPTION}}}:seek", "Seek", "*"),
    Rule("GET", f"/v1/{{snapshot={_SNAPSHOT}}}", "GetSnapshot"),
    Rule("GET", "/v1/{project=projects/*}/snapshots", "ListSnapshots"),
    Rule("PUT", f"/v1/{{name={_SNAPSHOT}}}", "CreateSnapshot", "*"),
    Rule("PATCH", f"/v1/{{snapshot.name={_SNAPSHOT}}}", "UpdateSnapshot", "*"),
    Rule("DELETE", f"/v1/{{snapshot={_SNAPSHOT}}}", "DeleteSnapshot"),
    Rule("POST", "/v1/{parent=projects/*}/schemas", "CreateSchema", "schema"),
    Rule("GET", f"/v1/{{name={_SCHEMA}}}", "GetSchema"),
    Rule("GET", "/v1/{parent=projects/*}/schemas", "ListSchemas"),
    Rule("GET", f"/v1/{{name={_SCHEMA}}}:listRevisions", "ListSchemaRevisions"),
    Rule("POST", f"/v1/{{name={_SCHEMA}}}:commit", "CommitSchema", "*"),
    Rule("POST", f"/v1/{{name={_SCHEMA}}}:rollback", "RollbackSchema", "*"),
    Rule("DELETE", f"/v1/{{name={_SCHEMA}}}:deleteRevision", "DeleteSchemaRevision"),
    Rule("DELETE", f"/v1/{{name={_SCHEMA}}}", "DeleteSchema"),
    Rule("POST", "/v1/{parent=projects/*}/schemas:validate", "ValidateSchema", "*"),
    Rule("POST", "/v1/{parent=projects/*}/schemas:validateMessage", "ValidateMessage", "*"),
    *(
        rule
        for kind in (_TOPIC, _SUBSCRIPTION, _SNAPSHOT, _SCHEMA)
        for rule in (
            Rule("GET", f"/v1/{{resource={kind}}}:getIamPolicy", "GetIamPolicy"),
            Rule("POST", f"/v1/{{resource={kind}}}:setIamPolicy", "SetIamPolicy", "*"),
            Rule("POST", f"/v1/{{resource={kind}}}:testIamPermissions", "TestIamPermissions", "*"),
        )
    ),
)


def find_rule(verb: str, path: str) -> tuple[Rule, Mapping[str, str]] | None:
    """Return the rule for an HTTP request and the fields in its path."""
    for rule in RULES:
        fields = rule.match(verb, path)
        if fields is not None:
            return rule, fields
    return None
