{{ config(materialized='incremental', incremental_strategy='insert_overwrite', partition_by={'field': 'day', 'data_type': 'date', 'copy_partitions': true}) }}
select day, model, price from {{ ref('rows') }}
{% if is_incremental() %} where day >= '2026-01-02' {% endif %}
