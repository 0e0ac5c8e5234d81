"""From what callers send to the inputs of models: texts, image parameters, images, files."""
