"""Traces: W3C context across HTTP and Pub/Sub, spans, and their export by OTLP if configured."""
