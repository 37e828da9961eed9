"""The command that installs jslices. It is in no registry yet: once it is, this changes."""

#: For pip, with room for extras. The address is that of pyproject.toml.
REQUIREMENT = "jslices{extras} @ git+https://github.com/jslices/jslices"


def install_command(extra: str = "") -> str:
    """The command that installs jslices with an optional part, for messages and pages.

    Example:
      >>> print(install_command("keras"))
      pip install "jslices[keras] @ git+https://github.com/jslices/jslices"
    """
    requirement = REQUIREMENT.format(extras=f"[{extra}]" if extra else "")
    return f'pip install "{requirement}"'
