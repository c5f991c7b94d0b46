import pytest


def raises(error, argument, *texts):
    """The message names the argument, and says what was got."""
    texts = (f"`{argument}`", *texts)
    return pytest.raises(error, match="".join(f"(?=(.|\n)*{text})" for text in texts))
