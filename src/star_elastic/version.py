"""The version of this package: read by the build, by ``--version``, and written into every file we make."""

VERSION = "0.1.0"
