"""Maps the input of callers to inputs of models: texts, image parameters, images, files."""
