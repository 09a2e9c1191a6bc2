"""What goes wrong before any rank starts."""


class LaunchError(ValueError):
    """The request can't be carried out; the text is one line that says why and what to do."""
