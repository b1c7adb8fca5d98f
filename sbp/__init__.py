"""sbp: does a module that is split over many ranks still compute what it computes on one device?"""

from sbp._version import __version__

__all__ = ["__version__"]
