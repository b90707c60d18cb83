"""A YAML file of a few lines whose aliases stand for millions of values."""
LAUGHS = "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
