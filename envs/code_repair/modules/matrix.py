"""Matrices of integers as lists of rows."""

Matrix = list[list[int]]


def transpose(matrix: Matrix) -> Matrix:
    """Rows become columns."""
    return [list(column) for column in zip(*matrix, strict=True)]


def multiply(left: Matrix, right: Matrix) -> Matrix:
    """The product; ValueError where the shapes do not fit."""
    if len(left[0]) != len(right):
        raise ValueError("the shapes do not fit")
    columns = transpose(right)
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


def identity(size: int) -> Matrix:
    """Ones on the diagonal."""
    return [[1 if row == column else 0 for column in range(size)] for row in range(size)]


def power(matrix: Matrix, exponent: int) -> Matrix:
    """The matrix times itself; the identity for exponent 0."""
    if exponent < 0:
        raise ValueError("the exponent is negative")
    result = identity(len(matrix))
    for _ in range(exponent):
        result = multiply(result, matrix)
    return result


def determinant(matrix: Matrix) -> int:
    """By the first row."""
    if len(matrix) == 1:
        return matrix[0][0]
    total = 0
    for column, value in enumerate(matrix[0]):
        minor = [row[:column] + row[column + 1 :] for row in matrix[1:]]
        total += (-1) ** column * value * determinant(minor)
    return total
