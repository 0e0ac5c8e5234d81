"""Converts callers' inputs to model inputs: texts, image parameters, images, and files."""
