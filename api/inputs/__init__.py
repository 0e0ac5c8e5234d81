"""Converts callers' inputs to model inputs: text, image parameters, images, and files."""
