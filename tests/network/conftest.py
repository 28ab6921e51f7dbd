"""Small quantised networks for every test of this folder."""

from small_networks import made  # noqa: F401 - a fixture
