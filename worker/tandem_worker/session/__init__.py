"""One attempt from a worker's point of view: prepare, shake hands, step, control, close."""
