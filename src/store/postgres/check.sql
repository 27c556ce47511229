-- Whether the database takes writes, and forgets none that it has acknowledged.
SELECT
    pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean AS read_only,
    current_setting('fsync') AS fsync,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('server_encoding') AS server_encoding,
    -- Null where there is no such table.
    has_table_privilege(to_regclass('onceward_record'), 'SELECT')
    AND has_table_privilege(to_regclass('onceward_record'), 'INSERT')
    AND has_table_privilege(to_regclass('onceward_record'), 'UPDATE')
    AND has_table_privilege(to_regclass('onceward_record'), 'DELETE') AS privileged
