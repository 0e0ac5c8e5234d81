"""Before the first apply: what a catalogue and expected rates need of Google Cloud, and what a month of it costs."""
