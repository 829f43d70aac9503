"""Why a tokenizer does not open."""


class TokenizerError(Exception):
    """A tokenizer that cannot be used; the text says what is wrong with which part of it."""
