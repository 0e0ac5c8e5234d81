"""Topics and subscriptions on Pub/Sub, on RabbitMQ, or in memory."""
