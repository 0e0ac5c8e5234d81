"""Validates a subscription's `bigquery_config`.

Source: https://cloud.google.com/pubsub/docs/reference/rest/v1/projects.subscriptions#BigQueryConfig
"""

import re

from pubsub_emulator.errors import InvalidArgument, Unimplemented
from pubsub_emulator.protos import BigQueryConfig, Subscription

_TABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]*\.\w{1,1024}\.[\w -]{1,1024}")


def complete_bigquery_config(subscription: Subscription) -> None:
    """Validate a subscription's `bigquery_config` and set its output-only fields.

    The table's existence is not checked. If the table is missing, the config's state shows that
    later.

    Raises:
        InvalidArgument: the table name is invalid, or mutually exclusive settings are used
            together.
        Unimplemented: the config requests the columns of the topic's schema.
    """
    config = subscription.bigquery_config
    if not _TABLE.fullmatch(config.table):
        raise InvalidArgument(
            f"Invalid BigQuery table given (table={config.table}). It must have the form "
            "{projectId}.{datasetId}.{tableId}."
        )
    if config.use_topic_schema and config.use_table_schema:
        raise InvalidArgument("Only one of use_topic_schema and use_table_schema may be set.")
    if config.use_topic_schema:
        raise Unimplemented(
            "The embedded Pub/Sub does not support bigquery_config.use_topic_schema. Use "
            "use_table_schema, or Google's Pub/Sub."
        )
    if subscription.enable_exactly_once_delivery:
        raise InvalidArgument(
            "Exactly-once delivery is only supported for pull subscriptions, not with "
            "bigquery_config."
        )
    config.state = BigQueryConfig.State.Value("ACTIVE")
