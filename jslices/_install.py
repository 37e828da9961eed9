"""The command that installs jslices, which is in no registry, and has no address yet."""


def install_command(extra: str) -> str:
    """The command that installs an optional part, for messages.

    Example:
      >>> print(install_command("keras"))
      pip install ".[keras]" in a checkout of jslices
    """
    return f'pip install ".[{extra}]" in a checkout of jslices'
