"""The parity check: any model under any layout against one process."""
