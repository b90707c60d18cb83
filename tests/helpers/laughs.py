"""A YAML file of a few lines whose aliases expand to millions of values."""
LAUGHS = "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
