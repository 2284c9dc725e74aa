"""Untrusted files: opened, unpacked and parsed within limits, and never written to.

A run folder, a trajectory or an adapter may come from somebody else. All code that reads one opens it through this
package.
"""
