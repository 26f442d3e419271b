"""Parts of Vitals that can be left out; the other packages find them by entry points."""
