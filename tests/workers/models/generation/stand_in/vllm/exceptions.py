"""Errors caused by a request."""


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    pass
