"""A Pub/Sub for one machine and for tests: `google.pubsub.v1` over gRPC and REST.

It stores its state in memory or in a directory. `pubsub-emulator` runs it alone. In a program:

    async with serve("127.0.0.1", 0) as server:
        os.environ["PUBSUB_EMULATOR_HOST"] = server.endpoint

`parse_filter` parses a subscription's filter like the server.
"""

from pubsub_emulator.server import PubsubServer, serve
from pubsub_emulator.state.filter import Filter, parse_filter

__all__ = ["Filter", "PubsubServer", "parse_filter", "serve"]
