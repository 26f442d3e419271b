"""Updates that can be skipped with the state bitwise unchanged, and setups that are refused."""
