def printable(text: str) -> str:
    """Escapes all characters of a text that are neither visible nor a space, as `repr`
    does. Text from a file could otherwise send commands to a terminal, or pass for
    other text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
