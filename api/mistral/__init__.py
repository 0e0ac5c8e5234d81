"""Mistral's API: document OCR."""
