"""Files and batches: what is kept of them in the object store."""
