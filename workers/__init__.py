"""The workers: pull jobs, batch, run the model, reply, and leave a row."""
