"""One function per operator makes its benchmark cases: shapes, operations and traffic. There is a
module for each family of operators.

Every function takes the sizes, then the case's targets; further keyword arguments are fields of
`BenchmarkCase` or options of the operator. `case_list.py` calls them with the sizes of the
documented models.
"""
