"""Pipeline parallelism: stage plans and cutting, schedules as data, transport, the runner."""
