"""Traces: W3C context across HTTP and Pub/Sub, spans, and OTLP export if configured."""
