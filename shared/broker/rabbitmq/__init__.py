"""The broker interface for RabbitMQ (AMQP 0-9-1).

Decision 67 describes how topics map to queues.
"""
