-- Of the records that are due after $2 and not after $3 (microseconds of the epoch), moves those that outlive the edge, $1
-- microseconds ago, to their expiry. Those that are to be held are looked at again later, whatever their retention.
WITH alive AS MATERIALIZED (
    SELECT r.ctid AS address
    FROM
        (SELECT clock_timestamp() - $1 * interval '1 microsecond' AS edge) AS c
        CROSS JOIN LATERAL (
            SELECT ctid
            FROM onceward_record
            WHERE
                purge_after > timestamptz 'epoch' + $2 * interval '1 microsecond'
                AND purge_after <= timestamptz 'epoch' + $3 * interval '1 microsecond'
                AND (expires_at > c.edge OR expires_at IS NULL)
            ORDER BY purge_after
            FOR UPDATE SKIP LOCKED
        ) AS r
)
UPDATE onceward_record AS r
SET purge_after = coalesce(
        r.expires_at,
        clock_timestamp() + greatest(r.retention * interval '1 microsecond', interval '10 minutes')
    )
FROM alive
WHERE r.ctid = alive.address
