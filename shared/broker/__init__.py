"""Topics and subscriptions, on Pub/Sub, RabbitMQ or in memory."""
