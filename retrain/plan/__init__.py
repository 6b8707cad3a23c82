"""Plans: which runs a file asks for, what they would cost, and whether their plugins accept their options.

Pure but for `preflight`, which builds tasks; nothing is created.
"""
