"""What the tests of all packages share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# The folders of tests: those of the workspace, and one beside each package.
TEST_ROOTS = [ROOT / "tests", *sorted(ROOT.glob("packages/*/tests"))]
