"""`penstock load`: replays a day or a trace, keeps a ledger, and compares it to usage rows."""
