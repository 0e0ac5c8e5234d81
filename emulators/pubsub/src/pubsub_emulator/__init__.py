"""An embedded Pub/Sub for a single machine and for tests: `google.pubsub.v1` over gRPC and REST.

State is kept in memory or in a directory. Run it standalone with `pubsub-emulator`, or inside a
program:

    async with serve("127.0.0.1", 0) as server:
        os.environ["PUBSUB_EMULATOR_HOST"] = server.endpoint

`parse_filter` parses a subscription's filter the way the server does.
"""

from pubsub_emulator.server import PubsubServer, serve
from pubsub_emulator.state.filter import Filter, parse_filter

__all__ = ["Filter", "PubsubServer", "parse_filter", "serve"]
