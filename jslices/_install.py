"""The command that installs jslices. It is in no registry yet: once it is, this changes."""

#: For pip, with room for extras. The address is that of pyproject.toml.
REQUIREMENT = "jslices{extras} @ git+https://github.com/jslices/jslices"


def install_command(extra: str = "") -> str:
    """What installs jslices with an optional part, as messages and pages say it.

    Example:
      >>> print(install_command("keras"))
      pip install "jslices[keras] @ git+https://github.com/jslices/jslices"
    """
    requirement = REQUIREMENT.format(extras=f"[{extra}]" if extra else "")
    return f'pip install "{requirement}"'
