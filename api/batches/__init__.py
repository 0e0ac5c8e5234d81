"""Files and batches, stored in the object store."""
