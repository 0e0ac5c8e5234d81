"""What is wrong with a request."""


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    pass
