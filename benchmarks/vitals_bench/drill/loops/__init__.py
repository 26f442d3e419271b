"""Programs of users, small: the structure of well-known training scripts, with Vitals in them."""
