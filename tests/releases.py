"""Which tests need a newer release of a library than the oldest one that zero works with.

`python -m benchmarks.versions` runs the tests with older and newer releases.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def installed(package: str) -> Version:
    """The installed release, without what names a build of it."""
    return Version(Version(version(package)).base_version)


def needs(package: str, oldest: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test unless the installed `package` is the release `oldest` or a newer one.

    `reason` says what older releases lack.
    """
    found = installed(package)
    text = f"{package} {found}, before {oldest}: {reason}"
    return pytest.mark.skipif(found < Version(oldest), reason=text)
