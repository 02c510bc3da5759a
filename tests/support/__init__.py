"""Helpers for the tests of all packages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# The folders of tests: the workspace's, and one in each package.
TEST_ROOTS = [ROOT / "tests", *sorted(ROOT.glob("packages/*/tests"))]
