"""The process that runs batches: `python -m api.batch_runner`."""
