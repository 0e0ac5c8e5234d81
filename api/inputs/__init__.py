"""Converts caller inputs to model inputs: texts, image parameters, images and files."""
