"""Google's clients over REST instead of gRPC."""

import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.pubsub_v1 import PublisherClient, SchemaServiceClient, SubscriberClient
from google.pubsub_v1.services.publisher.transports import PublisherRestTransport
from google.pubsub_v1.services.schema_service.transports import SchemaServiceRestTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberRestTransport
from google.pubsub_v1.types import PubsubMessage, Schema

from tests.conformance.target import Target


@pytest.fixture
def rest_publisher(target: Target) -> PublisherClient:
    credentials = AnonymousCredentials()
    transport = PublisherRestTransport(
        host=target.rest_host, credentials=credentials, url_scheme="http"
    )
    return PublisherClient(transport=transport)


@pytest.fixture
def rest_subscriber(target: Target) -> SubscriberClient:
    credentials = AnonymousCredentials()
    transport = SubscriberRestTransport(
        host=target.rest_host, credentials=credentials, url_scheme="http"
    )
    return SubscriberClient(transport=transport)


def test_message_makes_its_way(
    rest_publisher: PublisherClient, rest_subscriber: SubscriberClient, project: str
) -> None:
    topic, subscription = f"{project}/topics/jobs", f"{project}/subscriptions/workers"
    rest_publisher.create_topic(name=topic)
    rest_subscriber.create_subscription(name=subscription, topic=topic)
    message = PubsubMessage(data=b"hello", attributes={"k": "v"})
    published = rest_publisher.publish(topic=topic, messages=[message])
    (received,) = rest_subscriber.pull(subscription=subscription, max_messages=5).received_messages
    assert received.message.message_id == published.message_ids[0]
    assert (received.message.data, dict(received.message.attributes)) == (b"hello", {"k": "v"})
    rest_subscriber.acknowledge(subscription=subscription, ack_ids=[received.ack_id])
    assert [topic.name for topic in rest_publisher.list_topics(project=project)] == [topic]
    rest_subscriber.delete_subscription(subscription=subscription)
    rest_publisher.delete_topic(topic=topic)
    with pytest.raises(exceptions.NotFound):
        rest_publisher.get_topic(topic=topic)


def test_subscription_is_updated(
    rest_publisher: PublisherClient, rest_subscriber: SubscriberClient, project: str
) -> None:
    topic, subscription = f"{project}/topics/jobs", f"{project}/subscriptions/workers"
    rest_publisher.create_topic(name=topic)
    rest_subscriber.create_subscription(name=subscription, topic=topic)
    changed = {"name": subscription, "ack_deadline_seconds": 60}
    request = {"subscription": changed, "update_mask": {"paths": ["ack_deadline_seconds"]}}
    assert rest_subscriber.update_subscription(request=request).ack_deadline_seconds == 60


def test_refusals_have_their_classes(rest_publisher: PublisherClient, project: str) -> None:
    topic = f"{project}/topics/jobs"
    with pytest.raises(exceptions.NotFound):
        rest_publisher.publish(topic=topic, messages=[PubsubMessage(data=b"x")])
    rest_publisher.create_topic(name=topic)
    with pytest.raises(exceptions.Conflict):
        rest_publisher.create_topic(name=topic)
    with pytest.raises(exceptions.BadRequest):
        rest_publisher.create_topic(name=f"{project}/topics/a")


def test_schema_is_made_and_shown(target: Target, project: str) -> None:
    transport = SchemaServiceRestTransport(
        host=target.rest_host, credentials=AnonymousCredentials(), url_scheme="http"
    )
    schemas = SchemaServiceClient(transport=transport)
    schema = Schema(type_=Schema.Type.AVRO, definition='"string"')
    made = schemas.create_schema(parent=project, schema=schema, schema_id="text")
    assert schemas.get_schema(name=made.name) == made
    schemas.delete_schema(name=made.name)
