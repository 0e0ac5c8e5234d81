"""The broker seam over RabbitMQ (AMQP 0-9-1). Decision 67 says how topics become queues."""
