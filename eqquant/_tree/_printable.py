def printable(text: str) -> str:
    """Text, such as a name from a file, with escapes for all that is no visible
    character or space, as `repr` has them: terminals take these as commands, or print
    them as other text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
