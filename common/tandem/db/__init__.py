"""PostgreSQL: schema, embedded server, the supervisor's writes, the reference's sink, and queries."""
