"""Every knob, its default and its checks. No torch here: `tandem --help` stays fast."""

from tandem.config.run import Config

__all__ = ["Config"]
