"""Stand-alone scripts that show a failure: written from its trial, run before they are given out, and made small."""
